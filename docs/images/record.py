"""Record what a command prints as an SVG picture in which each line appears when it came, 12 times faster.

    python docs/images/record.py make demo > docs/images/demo.svg

Lines of one progress bar follow each other in one row. A viewer that wants no motion shows the last of them.
"""

import re
import subprocess
import sys
import time
from xml.sax.saxutils import escape

FASTER = 12
COLUMNS = 118
LINE_HEIGHT, CHARACTER_WIDTH, MARGIN = 17, 7.25, 14
STYLE = """
text { font: 12px/1 ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; }
text { fill: #d7dae0; white-space: pre; }
.title { fill: #8fd6ff; } .command { fill: #b9e28c; }
.passing { opacity: 0; }
@media (prefers-reduced-motion: no-preference) {
  text { opacity: 0; animation: appear 0s forwards; }
  .passing { animation: pass 1s steps(1); }
  @keyframes appear { to { opacity: 1; } }
  @keyframes pass { from, to { opacity: 1; } }
}"""
PROGRESS = re.compile(r"([a-z]\w*[^:]*): [\d,]+/[\d,]+ ")


def record(command: list[str]) -> list[tuple[float, str]]:
  """Return the lines that a command prints, each with the seconds from the start until it came."""
  start = time.monotonic()
  with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
    assert process.stdout is not None
    lines = [(time.monotonic() - start, line.rstrip("\n")) for line in process.stdout]
  if process.returncode:
    sys.exit(f"the command ended with {process.returncode}: {lines[-1:]}")
  return lines


def picture(lines: list[tuple[float, str]]) -> str:
  """Return the SVG text of lines and their times in seconds."""
  texts, row = [], -1
  for (seconds, line), (next_seconds, next_line) in zip(lines, [*lines[1:], (0.0, "")], strict=True):
    row += 1
    timing = f"animation-delay: {seconds / FASTER:.2f}s"
    style = style_of(line)
    if are_of_one_bar(line, next_line):
      style = "passing"
      timing += f"; animation-duration: {(next_seconds - seconds) / FASTER:.2f}s"
    y = MARGIN + (row + 0.75) * LINE_HEIGHT
    texts.append(
      f'<text x="{MARGIN}" y="{y:.0f}" class="{style}" style="{timing}">{escape(shorten(line))}</text>'
    )
    if style == "passing":
      row -= 1
  width, height = round(COLUMNS * CHARACTER_WIDTH + 2 * MARGIN), (row + 1) * LINE_HEIGHT + 2 * MARGIN
  return "\n".join(
    [
      f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">',
      f"<style>{STYLE}\n</style>",
      f'<rect width="{width}" height="{height}" rx="8" fill="#1d2026"/>',
      *texts,
      "</svg>",
    ]
  )


def are_of_one_bar(line: str, next_line: str) -> bool:
  """Return whether two lines are those of one progress bar."""
  bar, next_bar = PROGRESS.match(line), PROGRESS.match(next_line)
  return bool(bar and next_bar and bar[1] == next_bar[1])


def shorten(line: str) -> str:
  """Return a line without terminal colours, cut to the picture's columns."""
  plain = re.sub(r"\x1b\[[\d;]*m", "", line)
  return plain if len(plain) <= COLUMNS else plain[: COLUMNS - 1] + "…"


def style_of(line: str) -> str:
  """Return the class of a line: a step's title, a command, or output."""
  return "title" if line.startswith("== ") else "command" if line.startswith("$ ") else "output"


if __name__ == "__main__":
  print(picture(record(sys.argv[1:])))
