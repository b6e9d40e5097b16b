"""Fast-LLM's command with `type: headloss` among its losses: python -m headloss.integrations.fast_llm_cli train gpt"""

import importlib

if __name__ == "__main__":
    importlib.import_module("headloss.integrations.fast_llm_plugin")
    importlib.import_module("fast_llm.cli").fast_llm_main()
