"""Loss curves as a small SVG."""

from __future__ import annotations

import math
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 320, 48, 40, 16
COLOURS = ("#1f5fa8", "#b8500a", "#2a7d3f", "#7a3d9a")


def draw(curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """One line a curve: loss on a logarithmic axis over the step."""
    points = [point for curve in curves.values() for point in curve]
    most = max(step for step, _ in points)
    low, high = (math.log(edge(loss for _, loss in points)) for edge in (min, max))
    span = max(high - low, 1e-3)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - 12) * step / most

    def y(log_loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - log_loss) / span

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for at in range(5):
        level = low + span * at / 4
        parts.append(f'<path d="M{LEFT} {y(level):.1f}H{WIDTH - 12}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(level) + 4:.1f}" text-anchor="end">{math.exp(level):.2f}</text>')
        parts.append(f'<text x="{x(most * at / 4):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{most * at // 4:,}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">step</text>')
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join(f"{x(step):.1f},{y(math.log(loss)):.1f}" for step, loss in curve)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="{WIDTH - 16}" y="{TOP + 14 + 14 * number}" text-anchor="end" fill="{colour}">{name}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")
