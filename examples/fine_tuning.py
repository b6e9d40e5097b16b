"""Fine-tune a model of Transformers with its loss computed in the head: the same numbers, less memory.

    python examples/fine_tuning.py                                    # a small Llama on a CPU, half a minute
    python examples/fine_tuning.py --model Qwen/Qwen3-0.6B --batch 8 --length 4096       # on a GPU, from the hub

The model learns to continue the text of this repository's README, once unpatched and once after `patch(model)`.  The
two loss curves are the same; on a GPU, the patched model uses less memory.  Needs transformers; a plot needs
matplotlib.
"""

import argparse
import copy
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import headloss as hl
from headloss.integrations.transformers import patch
from headloss.losses import cross_entropy

OBJECTIVE = hl.Objective(ce=cross_entropy, metrics=["entropy", "accuracy"])  # patch(model) alone is cross-entropy


def model_and_tokens(name: str | None, device: str) -> tuple[torch.nn.Module, Tensor]:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    if name is not None:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
        return model.to(device), torch.tensor(AutoTokenizer.from_pretrained(name)(text)["input_ids"])
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **size))
    return model.to(device), torch.tensor(list(text.encode()))  # bytes are tokens enough


def train(model: torch.nn.Module, tokens: Tensor, args: argparse.Namespace, title: str) -> list[float]:
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate)
    generator, losses = torch.Generator().manual_seed(0), []
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(tokens) - args.length, (args.batch,), generator=generator)
        ids = torch.stack([tokens[i : i + args.length] for i in starts.tolist()]).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % max(1, args.steps // 10) == 0:
            print(f"{title}  step {step:4d} of {args.steps}  loss {losses[-1]:.4f}", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a causal language model of the hub; by default a small random one")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokens = model_and_tokens(args.model, device)
    plain = copy.deepcopy(model)
    curves, peaks = {}, {}
    for title, candidate in (("original", plain), ("patched ", patch(model, OBJECTIVE))):
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        curves[title] = train(candidate, tokens, args, title)
        peaks[title] = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
    furthest = max(abs(a - b) for a, b in zip(*curves.values(), strict=True))
    print(f"the two losses differ by {furthest:.1e} at most")
    for title, peak in peaks.items():
        print(f"{title}  peak memory {peak:.2f} GiB" if peak is not None else f"{title}  peak memory: only on a GPU")
    print({name: round(float(metric), 4) for name, metric in model.headloss.last.metrics.items()})
    draw(curves, args.out / "fine_tuning.png")


def draw(curves: dict[str, list[float]], path: Path) -> None:
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        return print("no plot: pip install matplotlib")
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for (title, losses), style in zip(curves.items(), ("-", "--"), strict=True):
        axes.plot(range(1, len(losses) + 1), losses, style, label=title)
    axes.set(xlabel="step", ylabel="loss, nats per token", title="Fine-tuning with and without patch(model)")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"plot: {path}")


if __name__ == "__main__":
    main()
