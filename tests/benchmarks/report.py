"""Figures as JSON, a Markdown table and plots."""

from __future__ import annotations

import json
import statistics

from measures import FLOOR, KEPT, NONE, ROWS

PLOTS = {
    "held_pairs": (
        "One claim and complete while somebody holds a snapshot",
        "jobs done",
        "ms",
        "linear",
    ),
    "backlog": ("Drain rate against backlog", "jobs queued", "jobs/s", "log"),
    "producers": ("Enqueue rate against producers", "producers", "jobs/s", "linear"),
}


def ratios(figures, name, against):
    """The ratio of one contender to another in each round."""
    return [
        value / base
        for value, base in zip(figures[name], figures[against], strict=True)
    ]


def summary(name, figures):
    """The row of the report."""
    row = ROWS[name]
    each = ratios(figures, row.of, row.against)
    made = {
        "measure": row.title,
        "unit": row.unit,
        "figure": statistics.median(figures[row.of]),
        "ratio": statistics.median(each),
        "spread": [min(each), max(each)],
        "wanted": row.wanted,
        "best_of_others": row.peers,
        "figures": figures,
    }
    if KEPT in figures:
        other = FLOOR if row.against == KEPT else KEPT
        made["other"] = [other, statistics.median(ratios(figures, row.of, other))]
    return made


def reached(name, made):
    """Whether a ratio is as wanted."""
    if ROWS[name].more_is_better:
        return made["ratio"] >= made["wanted"]
    return made["ratio"] <= made["wanted"]


def number(value):
    """Thousands with commas, small ones with decimals."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def markdown(rows, machine):
    """The table."""
    lines = [
        (
            f"PostgreSQL {machine['server_version']}, {machine['cores']} cores, fsync"
            f" {machine['fsync']}, synchronous_commit {machine['synchronous_commit']},"
            f" {machine['rounds']} rounds; Python {machine['python']}, psycopg"
            f" {machine['psycopg']}."
        ),
        "",
        (
            "| measure | lenso-jobs | ÷ | ratio (rounds) | wanted | beside |"
            " best of eight others |"
        ),
        "|---|---:|---|---:|---:|---|---|",
    ]
    for name, made in rows.items():
        row = ROWS[name]
        sign = "≥" if row.more_is_better else "≤"
        against = {NONE: "an Instance without"}.get(row.against, row.against)
        beside = "{1:.2f} of {0}".format(*made["other"]) if "other" in made else ""
        low, high = made["spread"]
        lines.append(
            f"| {made['measure']} | {number(made['figure'])} {made['unit']} | {against}"
            f" | **{made['ratio']:.2f}** ({low:.2f} to {high:.2f})"
            f" | {f'{sign} {row.wanted:.2f}' if row.wanted else ''}"
            f" | {beside} | {made['best_of_others']} |"
        )
    return "\n".join(lines) + "\n"


def plots(curves, directory):
    """One picture for each set of curves."""
    import matplotlib as mpl  # noqa: PLC0415 - an extra

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "lenso-jobs"
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the choice above

    for name, lines in curves.items():
        title, across, up, scale = PLOTS[name]
        figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
        for label, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
        axes.set_title(title, fontsize=11)
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        axes.set_xscale(scale)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        figure.savefig(directory / f"{name}.svg", metadata={"Date": None})
        plt.close(figure)


def kept(directory, machine):
    """The rows that a directory holds."""
    before = json.loads((directory / "results.json").read_text())
    if before["machine"] != machine:
        raise SystemExit("what is there was measured in another way")
    return before["rows"]


def write(directory, machine, rows, curves):
    """Everything that was measured, into a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = {name: rows[name] for name in ROWS if name in rows}
    (directory / "results.json").write_text(
        json.dumps({"machine": machine, "rows": rows, "curves": curves}, indent=1)
        + "\n"
    )
    table = markdown(rows, machine)
    (directory / "results.md").write_text(table)
    if curves:
        plots(curves, directory)
    return table
