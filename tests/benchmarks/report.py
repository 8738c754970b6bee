"""Figures as JSON, a Markdown table and plots."""

from __future__ import annotations

import json
import statistics

from measures import KEPT, MEASURES, OURS

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


def ratio(measure, figures, name):
    """The ratio to what it is measured against: the median over the rounds."""
    return statistics.median(
        value / base
        for value, base in zip(figures[name], figures[measure.against], strict=True)
    )


def subject(figures):
    """What the ratio is of."""
    for name in (OURS, "loaded", "last two chunks"):
        if name in figures:
            return name
    raise KeyError(figures)


def summary(name, figures):
    """The row of a measure."""
    measure = MEASURES[name]
    ours = subject(figures)
    row = {
        "measure": measure.title,
        "unit": measure.unit,
        "figure": statistics.median(figures[ours]),
        "ratio": ratio(measure, figures, ours),
        "must": measure.must,
        "aim": measure.aim,
        "best_of_others": measure.peers,
        "figures": figures,
    }
    if KEPT in figures:
        row["ratio_with_key_and_evidence"] = ratio(measure, figures, KEPT)
    return row


def reached(name, row):
    """Whether a row is as good as it must be."""
    better = MEASURES[name].more_is_better
    return row["ratio"] >= row["must"] if better else row["ratio"] <= row["must"]


def number(value):
    """Thousands with commas, small ones with decimals."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def markdown(rows, machine):
    """The table."""
    lines = [
        (
            f"PostgreSQL {machine['server_version']}, {machine['cores']} cores, fsync"
            f" {machine['fsync']}, synchronous_commit {machine['synchronous_commit']},"
            f" {machine['rounds']} rounds; psycopg {machine['psycopg']}."
        ),
        "",
        (
            "| measure | lenso-jobs | measured against | ratio | raw SQL with key and"
            " evidence | aimed at | best of eight others |"
        ),
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    for name, row in rows.items():
        measure = MEASURES[name]
        with_key = row.get("ratio_with_key_and_evidence")
        sign = "≥" if measure.more_is_better else "≤"
        against = {"none": "an Instance without"}.get(measure.against, measure.against)
        lines.append(
            f"| {row['measure']} | {number(row['figure'])} {row['unit']} | {against}"
            f" | **{row['ratio']:.2f}** | {f'{with_key:.2f}' if with_key else ''}"
            f" | {f'{sign} {measure.must:g}' if measure.must else ''}"
            f" | {row['best_of_others']} |"
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
    rows = {name: rows[name] for name in MEASURES if name in rows}
    (directory / "results.json").write_text(
        json.dumps({"machine": machine, "rows": rows, "curves": curves}, indent=1)
        + "\n"
    )
    table = markdown(rows, machine)
    (directory / "results.md").write_text(table)
    if curves:
        plots(curves, directory)
    return table
