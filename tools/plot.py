#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draw results as an SVG: efficiency over concurrency, or bus bandwidth over size.

RESULTS are files of doc/results, or JSON lines as perseus-perf, perseus-nccl and perseus-netbench print with --json;
without a file they are read from standard input. Rows of perseus-perf putsignal become one plot of efficiency, a line
for each policy, group and size. Rows with a bus bandwidth become one panel for each operation, a line for each
transport or plugin. Rows of perseus-sim become, by what they vary: time over nodes, a line for each policy, with a bar
of where the time of the largest run went; or a map of which policy is best over size and concurrency. Other rows are
left out, and so are lines of one point where others have more.
"""
import argparse
import collections
import html
import json
import math
import os
import sys

COLOURS = ["#c0392b", "#2980b9", "#16a085", "#e67e22", "#8e44ad", "#7f8c8d", "#2c3e50", "#d4ac0d"]
WIDTH, HEIGHT, LEFT, TOP, BELOW, LEGEND = 510, 350, 60, 40, 50, 190


def read_rows(file):
    try:
        text, rows = file.read(), []
    except (OSError, UnicodeDecodeError) as e:
        sys.exit(f"perseus-plot: {file.name}: not text: {e}")
    try:
        whole = json.loads(text)
        if isinstance(whole, dict) and "command" in whole and "rows" not in whole:
            sys.exit(f"perseus-plot: {file.name}: a file of results without \"rows\": there is nothing to draw")
        rows = whole["rows"]
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            return rows
        rows = []
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    for number, line in enumerate(text.splitlines(), 1):
        try:
            rows += [json.loads(line)] if line.startswith("{") else []
        except (ValueError, RecursionError) as e:
            sys.exit(f"perseus-plot: {file.name}, line {number}: not JSON: {e}")
    if not rows:
        sys.exit(f"perseus-plot: {file.name}: no line of it is a JSON object, as --json of perseus-perf, perseus-nccl "
                 "and perseus-netbench prints them")
    return rows


def size_name(size):
    power = max(0, int(math.log2(size)) // 10)
    return f"{size / 1024 ** power:g}{['', 'K', 'M', 'G', 'T'][power]}"


CAUSES = ("compute", "fence", "proxy", "incast", "link", "latency")


def svg(width, height, parts):
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
                      'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>',
                      *parts]) + "\n</svg>\n"


def model_title(rows, what):
    return f"model of {rows[0]['cluster']}, {rows[0]['band']} values: {what}"


def draw_map(rows):
    """Which policy is fastest for each size and concurrency, and how much faster than drain."""
    sizes, counts = (sorted({row[name] for row in rows}) for name in ("bytes", "concurrency"))
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    parts = [f'<text x="{LEFT}" y="{TOP - 14}" '
             f'font-size="15">{html.escape(model_title(rows, "best policy (times as fast as drain)"))}</text>']
    wide, high = WIDTH / len(sizes), HEIGHT / len(counts)
    groups = list(dict.fromkeys(row["group"] for row in rows))
    for g, group in enumerate(groups):
        left = LEFT + g * (LEFT + WIDTH)
        parts.append(f'<text x="{left + WIDTH / 2}" y="{TOP + HEIGHT + 38}" text-anchor="middle">bytes '
                     f'({html.escape(group)})</text>')
        for i, size in enumerate(sizes):
            parts.append(f'<text x="{left + (i + 0.5) * wide:.1f}" y="{TOP + HEIGHT + 18}" '
                         f'text-anchor="middle">{size_name(size)}</text>')
        for k, count in enumerate(counts):
            y = TOP + HEIGHT - (k + 1) * high
            parts.append(f'<text x="{left - 6}" y="{y + high / 2:.1f}" text-anchor="end">{count}</text>')
            for i, size in enumerate(sizes):
                cell = {row["policy"]: row["put_signal_us"]
                        for row in rows if (row["bytes"], row["concurrency"], row["group"]) == (size, count, group)}
                best = min(cell, key=cell.get)
                gain = f"{cell['drain'] / cell[best]:.1f}x" if "drain" in cell else ""
                parts.append(f'<rect x="{left + i * wide:.1f}" y="{y:.1f}" width="{wide - 1:.1f}" '
                             f'height="{high - 1:.1f}" fill="{COLOURS[policies.index(best)]}" '
                             f'fill-opacity="0.5"/><text x="{left + (i + 0.5) * wide:.1f}" y="{y + high / 2:.1f}" '
                             f'text-anchor="middle">{gain}</text>')
    width = len(groups) * (LEFT + WIDTH) + LEGEND
    parts += [f'<text x="{width - LEGEND + 10}" y="{TOP + 12 + 16 * i}" '
              f'fill="{COLOURS[i]}">{html.escape(policy)}</text>' for i, policy in enumerate(policies)]
    return svg(width, TOP + HEIGHT + BELOW, parts)


def draw_scaling(rows):
    """Time over nodes, and where the time of the slowest rank went in the largest run of each policy."""
    lines = collections.defaultdict(list)
    for row in rows:
        lines[row["policy"]].append((row["nodes"], row["us"]))
    colours = {name: COLOURS[i] for i, name in enumerate(lines)}
    points = [point for line in lines.values() for point in line]
    parts = draw_panel(LEFT, model_title(rows, f"{rows[0]['op']}, us"), "nodes", lines,
                       size_axis([x for x, _ in points]), decade_axis([y for _, y in points]), colours)
    most, left = max(row["nodes"] for row in rows), 2 * LEFT + WIDTH
    last = [row for row in rows if row["nodes"] == most and "fence_us" in row]
    top = max((row["us"] for row in last), default=1)
    parts.append(f'<text x="{left}" y="{TOP - 14}" font-size="15">slowest rank, {most} nodes</text>' if last else "")
    for i, row in enumerate(last):
        y, x = TOP + 10 + i * 60, left
        parts.append(f'<text x="{left}" y="{y}">{html.escape(row["policy"])}: {row["us"]:.0f} us</text>')
        for k, cause in enumerate(CAUSES):
            wide = WIDTH * row[f"{cause}_us"] / top
            parts.append(f'<rect x="{x:.1f}" y="{y + 6}" width="{wide:.1f}" height="24" fill="{COLOURS[k]}" '
                         'fill-opacity="0.6"/>')
            x += wide
    width = 2 * (LEFT + WIDTH) + LEGEND
    parts += [f'<text x="{width - LEGEND + 10}" y="{TOP + 12 + 16 * i}" fill="{colour}">{html.escape(name)}</text>'
              for i, (name, colour) in enumerate(colours.items())]
    parts += [f'<text x="{width - LEGEND + 10}" y="{TOP + 120 + 16 * k}" fill="{COLOURS[k]}">bar: {cause}</text>'
              for k, cause in enumerate(CAUSES) if last]
    return svg(width, TOP + HEIGHT + BELOW, parts)


def draw_model(rows):
    """The plot of rows of the simulator, or None: they are drawn like measured ones."""
    if (rows and all(row["op"] in ("moe", "fused", "alltoall") for row in rows)
        and len({row["nodes"] for row in rows}) > 1):
        return draw_scaling(rows)
    if (rows and all(row["op"] == "putsignal" for row in rows) and len({row["bytes"] for row in rows}) > 1
        and len({row["concurrency"] for row in rows}) > 1):
        return draw_map(rows)
    return None


def panels_of(rows):
    """Panels: {(title, name of x): {line: [(x, y)]}}, and whether they are of bandwidths, whose axes are
    logarithmic."""
    efficiency, bandwidth = (collections.defaultdict(lambda: collections.defaultdict(list)) for _ in range(2))
    for row in rows:
        if row.get("op") == "putsignal":
            of = f"model of {row['cluster']}: " if row.get("model") else ""
            line = f"{of}{row['policy']}, {row['group']}, {row['bytes']} B, {row['peers']} peers"
            efficiency["put+signal as a share of put only, %", "transfers in flight together"][line].append(
                (row["concurrency"], min(100 * row["efficiency"], 110)))
        elif row.get("busbw_GBps", 0) > 0 and not row.get("in_place"):
            name = row.get("transport") or row.get("name") or "bus bandwidth"
            bandwidth[f"{row['op']}: bus bandwidth, GB/s", "bytes"][name].append((row["bytes"], row["busbw_GBps"]))
    panels = efficiency or bandwidth
    if any(len(line) > 1 for lines in panels.values() for line in lines.values()):
        panels = {panel: {name: line for name, line in lines.items() if len(line) > 1}
                  for panel, lines in panels.items()}
    return panels, not efficiency


# An axis: a function from a value to 0..1, and ticks as (value, name).
def linear_axis(most, last_tick):
    return lambda v: v / most, [(last_tick * i / 5, f"{last_tick * i / 5:g}") for i in range(6)]


def decade_axis(values):
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    return lambda v: (math.log10(v) - low) / (high - low), [(10.0 ** i, f"{10.0 ** i:g}") for i in range(low, high + 1)]


def size_axis(values):
    low, high = math.log2(min(values)), math.log2(max(values))
    ticks = [2 ** i for i in range(math.ceil(low), int(high) + 1, 4)]
    return lambda v: (math.log2(v) - low) / max(high - low, 1), [(tick, size_name(tick)) for tick in ticks]


def draw_panel(left, title, x_name, lines, x_axis, y_axis, colours):
    (to_x, x_ticks), (to_y, y_ticks) = x_axis, y_axis
    parts = [f'<text x="{left}" y="{TOP - 14}" font-size="15">{html.escape(title)}</text>']
    for value, name in y_ticks:
        y = TOP + HEIGHT * (1 - to_y(value))
        parts.append(f'<line x1="{left}" x2="{left + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
                     f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{name}</text>')
    for value, name in x_ticks:
        parts.append(f'<text x="{left + WIDTH * to_x(value):.1f}" y="{TOP + HEIGHT + 18}" '
                     f'text-anchor="middle">{name}</text>')
    parts.append(f'<text x="{left + WIDTH / 2}" y="{TOP + HEIGHT + 38}" text-anchor="middle">{x_name}</text>')
    for line, points in lines.items():
        at = [(left + WIDTH * to_x(x), TOP + HEIGHT * (1 - to_y(y))) for x, y in sorted(points)]
        parts.append(f'<polyline fill="none" stroke="{colours[line]}" stroke-width="2" points="' +
                     " ".join(f"{x:.1f},{y:.1f}" for x, y in at) + '"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colours[line]}"/>' for x, y in at]
    return parts


def draw(rows):
    modelled = [row for row in rows if row.get("model")]
    plot = draw_model(modelled) if len(modelled) == len(rows) else None
    if plot:
        return plot
    panels, is_bandwidth = panels_of(rows)
    if not panels:
        sys.exit("perseus-plot: no row of putsignal and none with a bus bandwidth")
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    points = [point for lines in panels.values() for line in lines.values() for point in line]
    x_values, y_values = zip(*points)
    x_axis = size_axis(x_values) if is_bandwidth else linear_axis(max(x_values), max(x_values))
    y_axis = decade_axis(y_values) if is_bandwidth else linear_axis(110, 100)
    width = len(panels) * (LEFT + WIDTH) + LEGEND
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{TOP + HEIGHT + BELOW}" '
             'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>']
    for i, ((title, x_name), lines) in enumerate(panels.items()):
        parts += draw_panel(LEFT + i * (LEFT + WIDTH), title, x_name, lines, x_axis, y_axis, colours)
    for i, name in enumerate(names):
        parts.append(f'<text x="{width - LEGEND + 10}" y="{TOP + 12 + 16 * i}" '
                     f'fill="{colours[name]}">{html.escape(name)}</text>')
    return "\n".join(parts) + "\n</svg>\n"


def full(file, error):
    """Ends: what was to be written is not all there."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())  # so that Python does not try again at exit
    sys.exit(f"perseus-plot: {file.name}: cannot write all of the output: {error.strerror}")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help lists the options)\n")

    def _print_message(self, message, file=None):  # argparse's own says nothing of a full disk
        try:
            print(message, end="", file=file or sys.stderr, flush=True)
        except OSError as e:
            full(file or sys.stderr, e)


def main():
    parser = Parser(prog="perseus-plot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                    epilog="example:\n  perseus-perf putsignal --json | perseus-plot -o putsignal.svg\n")
    parser.add_argument("--version", action="version", version="%(prog)s @VERSION@")
    parser.add_argument("results", nargs="*", type=argparse.FileType(), default=[sys.stdin])
    parser.add_argument("-o", dest="out", type=argparse.FileType("w"), default=sys.stdout,
                        help="the SVG (standard output)")
    args = parser.parse_args()
    rows = [row for file in args.results for row in read_rows(file)]
    try:
        drawn = draw(rows)
    except (ArithmeticError, KeyError, TypeError, ValueError) as e:
        sys.exit(f"perseus-plot: a row cannot be drawn, {type(e).__name__} {e}: was it printed by this version?")
    try:
        args.out.write(drawn)
        args.out.flush()
    except OSError as e:
        full(args.out, e)


if __name__ == "__main__":
    main()
