"""GRPO with TRL's trainer, with the loss computed in the head.

    python examples/grpo_trl.py                                       # a small Llama on a CPU, under a minute
    python examples/grpo_trl.py --model Qwen/Qwen3-0.6B --batch 32    # on a GPU, from the hub

The reward is the fraction of an answer's words that have an even number.  `objective=` takes any policy loss of
headloss; without it, TRL's own loss runs on log-probabilities from the head.  Needs trl; a plot needs matplotlib.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import GRPOConfig

import headloss as hl
from headloss.integrations.trl import GRPOTrainer
from headloss.losses import entropy_bonus, grpo

OBJECTIVE = hl.Objective(
    rl=hl.Term(grpo, low=0.2, high=0.28, reduction="seq_mean_token_mean"),
    bonus=hl.Term(entropy_bonus, weight=1e-3),
    metrics=["entropy"],
)


def small_model() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{i}": i for i in range(3, 64)}}
    made = Tokenizer(models.WordLevel(words, unk_token="w3"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config), tokenizer


class Progress(TrainerCallback):
    """Print a line ten times in a run."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "reward" in logs and state.global_step % max(1, state.max_steps // 10) == 0:
            now = f"reward {float(logs['reward']):.3f}  entropy {float(logs['entropy']):.3f}"
            print(f"step {state.global_step:4d} of {state.max_steps}  {now}", flush=True)


def even_words(completions: list[str], **_: object) -> list[float]:
    return [sum(word[-1] in "02468" for word in text.split()) / max(1, len(text.split())) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a causal language model of the hub; by default a small random one")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    model, tokenizer = (args.model, None) if args.model else small_model()
    on_cpu, length, rate = not torch.cuda.is_available(), *((128, 1e-6) if args.model else (8, 2e-2))
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=args.steps, logging_steps=1, per_device_train_batch_size=args.batch,
        num_generations=8, max_completion_length=length, learning_rate=rate,
        report_to=[], save_strategy="no", use_cpu=on_cpu, bf16=not on_cpu, disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model, processing_class=tokenizer, reward_funcs=even_words, args=config, objective=OBJECTIVE,
        train_dataset=Dataset.from_list([{"prompt": f"w{i} w{i + 1}"} for i in range(3, 60)]),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)  # it prints all metrics at each step
    trainer.add_callback(Progress())
    trainer.train()
    history = [line for line in trainer.state.log_history if "reward" in line]
    draw(history, args.out / "grpo_trl.png")


def draw(history: list[dict[str, float]], path: Path) -> None:
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        return print("no plot: pip install matplotlib")
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    units = {"reward": "fraction of even words", "entropy": "nats per token"}
    for axes, (name, unit) in zip(panels, units.items(), strict=True):
        axes.plot([line["step"] for line in history], [line[name] for line in history])
        axes.set(title=name, xlabel="step", ylabel=unit)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"plot: {path}")


if __name__ == "__main__":
    main()
