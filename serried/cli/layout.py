"""`serried layout`: the grid of a world of ranks, and the groups that they form."""

from __future__ import annotations

import argparse
import json

from serried.parallel.layout import AXES, KINDS, OPTIONS, RankLayout

_HELP = {
    "tp": "ranks that share each layer",
    "pp": "stages that share the layers among them",
    "dp": "replicas that run side by side in one engine",
    "pcp": "ranks that share the tokens of a long prompt",
    "dcp": "ranks of a TP group that share the KV cache while decoding",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `serried layout`."""
    parser.add_argument(
        OPTIONS["world_size"],
        type=int,
        metavar="N",
        help="all ranks; what the other sizes leave over is external_dp (default: their product)",
    )
    for name, text in _HELP.items():
        parser.add_argument(
            OPTIONS[name],
            f"-{name}",
            dest=name,
            type=int,
            default=1,
            metavar="N",
            help=f"{text} (default: 1)",
        )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Print the layout that the options describe."""
    world_size = args.world_size
    if world_size is None:
        world_size = args.tp * args.pp * args.dp * args.pcp
    layout = RankLayout(world_size, args.tp, args.pp, args.dp, args.pcp, args.dcp)
    if args.json:
        groups = {kind: layout.groups(kind) for kind in KINDS}
        print(json.dumps({"world_size": world_size, **groups}))
    else:
        print("\n".join([_title(layout), "", *_picture(layout), "", *_group_lines(layout)]))
    return 0


def _title(layout: RankLayout) -> str:
    sizes = zip(AXES, layout.shape, strict=True)
    product = " x ".join(f"{axis} {size}" for axis, size in sizes if size > 1)
    ranks = "1 rank" if layout.world_size == 1 else f"{layout.world_size} ranks"
    return f"{ranks} = {product}" if product else ranks


def _picture(layout: RankLayout) -> list[str]:
    """The grid: a row is a TP group, a bar in it parts the DCP groups, an empty line parts the replicas."""
    rows = layout.groups("tp")
    labels = [_label(layout, row[0]) for row in rows]
    names = [f"tp {i}" for i in range(layout.tp)]
    label_width = max(map(len, labels))
    width = max(len(names[-1]), len(str(layout.world_size - 1)))
    head = _cells(names, layout.dcp, width).replace("|", " ")
    lines = [f"{'':{label_width}}    {head}"]
    per_replica = layout.pp * layout.pcp
    for i, (label, row) in enumerate(zip(labels, rows, strict=True)):
        if i and per_replica > 1 and i % per_replica == 0:
            lines.append("")
        lines.append(f"{label:{label_width}}  [ {_cells(row, layout.dcp, width)} ]")
    return lines


def _label(layout: RankLayout, rank: int) -> str:
    """A rank's place along the axes of more than one, except tp."""
    axes = zip(AXES, layout.shape, layout.coordinates(rank), strict=True)
    digits = {axis: len(str(size - 1)) for axis, size in zip(AXES, layout.shape, strict=True)}
    return "  ".join(f"{axis} {index:>{digits[axis]}}" for axis, size, index in axes if size > 1 and axis != "tp")


def _cells(values: list[str] | list[int], dcp: int, width: int) -> str:
    cells = [f"{value:>{width}}" for value in values]
    runs = ["  ".join(cells[i : i + dcp]) for i in range(0, len(cells), dcp)]
    return (" | " if dcp > 1 else "  ").join(runs)


def _group_lines(layout: RankLayout) -> list[str]:
    """Each kind of groups on a line: its name, how many of which size, the ranks."""
    table = []
    for kind in KINDS:
        groups = layout.groups(kind)
        size = len(groups[0])
        ranks = " ".join(map(str, groups)) if size > 1 else "each rank by itself"
        table.append((kind, f"{len(groups)} of {size}", ranks))
    name, count = (max(len(row[i]) for row in table) for i in (0, 1))
    return [f"{kind:{name}}  {sizes:>{count}}  {ranks}" for kind, sizes, ranks in table]
