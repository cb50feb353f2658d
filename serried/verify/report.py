"""What `verify` says: a table for people, a document for programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from serried.config import EngineConfig
from serried.verify.compare import Bounds, Comparison, holds


@dataclass(frozen=True)
class Report:
    """All comparisons of one verification, and the verdict."""

    model: str
    config: EngineConfig
    prompt: tuple[int, ...]
    comparisons: tuple[Comparison, ...]
    bounds: Bounds
    weights: str | None  # what the file's tensors became, where any of them was or is quantized

    @property
    def ok(self) -> bool:
        """Whether the split changes nothing. Nodes added in the wrong order may change no more than a bit."""
        exact = self.config.sabotage == "rank-order"
        return holds(self.comparisons, self.bounds, to_the_bit=exact)

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "backend": self.config.backend,
            "isa": self.comparisons[0].run.isa,
            "dtype": self.config.dtype,
            "quantization": self.config.quantization,
            "weights": self.weights,
            "prompt_ids": list(self.prompt),
            "tolerance": self.bounds.first,
            "reference_tolerance": self.bounds.reference,
            "reference_share_tolerance": self.bounds.reference_share,
            "sabotage": self.config.sabotage,
            "runs": [comparison.to_json() for comparison in self.comparisons],
            "ok": self.ok,
        }


def print_report(report: Report) -> None:
    """Print the table and the verdict."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    title = f"{report.model}, {report.config.dtype}, {report.config.backend} ({report.comparisons[0].run.isa})"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True)
    for heading in ("tp", "rank", "params", "q", "kv", "MiB", "reduces", "diff", "bits", "tokens", "to ref"):
        table.add_column(heading, justify="right", no_wrap=True)
    for c in report.comparisons:
        verdict = (
            f"{c.run.all_reduces_prefill}",
            f"{c.max_abs_logit_diff:.1e}",
            "equal" if c.bitwise_equal else "differ",
            "equal" if c.tokens_equal else "differ",
            _to_reference(c, report.bounds),
        )
        for rank, info in enumerate(c.run.ranks):
            table.add_row(
                f"{c.run.tp}" if rank == 0 else "",
                f"{rank}",
                f"{info.parameters / 1e6:.1f} M",
                f"{info.query_heads}",
                f"{info.kv_heads}",
                f"{info.peak_rss_bytes >> 20:,}",
                *(verdict if rank == 0 else ()),
            )
    console.print(table)
    first = report.comparisons[0]
    console.print(
        f"prompt of {len(report.prompt)} tokens, {len(first.run.tokens)} greedy tokens "
        f"({len(set(first.run.tokens))} distinct); logits spread {first.logit_std:.2f}; "
        "reduces: all-reduces of the prefill; q, kv: heads; MiB: a rank's peak while loading",
        highlight=False,
    )
    if report.weights:
        console.print(f"weights: {report.weights}", highlight=False)
    bounds = report.bounds
    allowed = f"logits within {bounds.first:g}" if bounds.first else "logits the same bits"
    if bounds.reference_share is not None and first.rms_share_reference is not None:
        allowed += f" and, rms, within {bounds.reference_share:.0%} of their spread of the reference"
    if report.ok:
        console.print(f"[green]holds[/]: tokens equal, {allowed}", highlight=False)
    else:
        damaged = f" (--sabotage {report.config.sabotage})" if report.config.sabotage else ""
        console.print(f"[red]does not hold[/]{damaged}: must be tokens equal, {allowed}", highlight=False)


def _to_reference(c: Comparison, bounds: Bounds) -> str:
    """The distance to the reference in the measure that is binding."""
    if c.max_abs_diff_reference is None:
        return "-"
    if bounds.reference_share is not None and c.rms_share_reference is not None:
        return f"{c.rms_share_reference:.1%}"
    return f"{c.max_abs_diff_reference:.1e}"
