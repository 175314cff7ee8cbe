"""The frame of a report: one HTML file with its style and script inside, readable without the script."""

from __future__ import annotations

import html

from flux_db.console import printable

# Light and dark, phone and desk. c0 to c5 are the colours of lines.
STYLE = """
:root { color-scheme: light dark; --paper: #fbfbf9; --card: #fff; --ink: #1d1f23; --soft: #6a6f78; --rule: #e4e4df;
  --accent: #2463c9; --good: #1d7a46; --warn: #a45b00; --bad: #b3261e;
  --c0: #2463c9; --c1: #d2691e; --c2: #1b8a5a; --c3: #a5388f; --c4: #8a6d00; --c5: #5b6470; }
@media (prefers-color-scheme: dark) { :root { --paper: #15171a; --card: #1d2024; --ink: #e8e8e4; --soft: #9aa0a9;
  --rule: #33373d; --accent: #86b0ff; --good: #6fcf97; --warn: #f0b35a; --bad: #ff8a80;
  --c0: #86b0ff; --c1: #f3a05f; --c2: #63cf9d; --c3: #e08ad0; --c4: #d9bd55; --c5: #a9b1bc; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); -webkit-text-size-adjust: 100%;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Noto Sans CJK SC", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 44px 0 14px; padding-top: 18px; border-top: 1px solid var(--rule); }
h3 { font-size: .95rem; margin: 18px 0 6px; }
p { margin: 6px 0; } a { color: var(--accent); }
.lead { color: var(--soft); overflow-wrap: anywhere; } .note { color: var(--soft); font-size: .85rem; }
.pill { display: inline-block; vertical-align: middle; margin-left: 10px; padding: 2px 10px; border-radius: 99px;
  font-size: .8rem; font-weight: 600; border: 1px solid currentColor; color: var(--soft); letter-spacing: 0; }
.pill.finished { color: var(--good); } .pill.running { color: var(--accent); }
.pill.interrupted { color: var(--warn); } .pill.failed { color: var(--bad); }
.message { border-left: 3px solid var(--bad); padding: 4px 12px; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(116px, 1fr)); gap: 10px; margin: 24px 0 0; }
.tiles div { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 10px 14px; }
.tiles dt { color: var(--soft); font-size: .8rem; }
.tiles dd { margin: 0; font-size: 1.2rem; font-weight: 600; white-space: nowrap; }
.tiles dd small { display: block; font-size: .78rem; font-weight: 400; white-space: normal; color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr)); gap: 14px; }
figure { margin: 0; }
.chart { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 12px 12px 6px; }
.chart figcaption { display: flex; gap: 10px; align-items: baseline; flex-wrap: wrap; padding: 0 4px 6px; }
.name { font-weight: 600; } .value { color: var(--soft); font-variant-numeric: tabular-nums; }
.chart .note { margin-left: auto; }
svg { display: block; width: 100%; height: auto; overflow: visible; } svg svg { overflow: hidden; }
svg text { fill: var(--soft); font-size: 11px; font-variant-numeric: tabular-nums; }
.grid { stroke: var(--rule); stroke-width: 1; vector-effect: non-scaling-stroke; }
path { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; vector-effect: non-scaling-stroke; }
path.faint { stroke-width: 1; opacity: .38; } circle { fill: currentColor; }
.cross { stroke: var(--soft); stroke-dasharray: 3 3; vector-effect: non-scaling-stroke; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.c4 { color: var(--c4); } .c5 { color: var(--c5); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 0 4px 6px; padding: 0;
  font-size: .85rem; }
.legend i { display: inline-block; width: 14px; height: 3px; background: currentColor; margin-right: 6px;
  vertical-align: middle; border-radius: 2px; }
.legend b { font-weight: 600; font-variant-numeric: tabular-nums; }
.slider { display: none; gap: 14px; align-items: center; margin: 0 0 12px; position: sticky; top: 0; z-index: 1;
  background: var(--paper); padding: 8px 0; }
.slider input { flex: 1; accent-color: var(--accent); min-width: 0; height: 28px; margin: 0; }
.slider output { font-weight: 600; min-width: 5.5em; font-variant-numeric: tabular-nums; }
button { font: inherit; font-size: .85rem; color: inherit; background: var(--card); border: 1px solid var(--rule);
  border-radius: 8px; padding: 5px 12px; cursor: pointer; }
.js .slider { display: flex; } .js .rounds:not(.all) .round { display: none; }
.js .rounds:not(.all) .round.on { display: block; } .js .rounds:not(.all) .round > h3 { display: none; }
.rounds.all .slider input { visibility: hidden; } .rounds.all .slider output { visibility: hidden; }
.round { margin-bottom: 18px; }
.prompt { margin: 12px 0 6px; overflow-wrap: anywhere; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(46%, 230px), 1fr)); gap: 10px; }
.pictures img { display: block; width: 100%; height: auto; border-radius: 8px; background: var(--rule); }
.pictures figcaption { font-size: .82rem; line-height: 1.35; padding: 5px 2px 0; overflow-wrap: anywhere; }
.pictures figcaption span { display: block; color: var(--soft); font-size: .76rem; }
.training { grid-template-columns: repeat(auto-fill, minmax(min(30%, 150px), 1fr)); gap: 14px 10px; }
.beside .pictures { grid-template-columns: repeat(auto-fill, minmax(min(46%, 140px), 1fr)); }
.beside { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr)); gap: 10px 28px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--rule);
  overflow-wrap: anywhere; min-width: 5.5em; }
th { font-weight: 600; color: var(--soft); font-size: .8rem; } td:first-child { white-space: nowrap; }
code, pre { font: .85rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 12px 14px; margin: 6px 0;
  overflow-x: auto; }
details { margin: 12px 0; } summary { cursor: pointer; color: var(--accent); padding: 4px 0; }
footer { margin-top: 48px; color: var(--soft); font-size: .8rem; }
@media (max-width: 560px) { main { padding: 20px 14px 48px; } h1 { font-size: 1.4rem; }
  .tiles { grid-template-columns: 1fr 1fr; } svg text { font-size: 13px; }
  td:first-child { white-space: normal; } th, td { padding-right: 8px; } }
@media print { .slider { display: none !important; } .js .rounds .round { display: block !important; } }
"""

# The slider over the rounds of samples, and the values under the pointer in charts.
SCRIPT = """
document.documentElement.classList.add('js');
document.querySelectorAll('.rounds').forEach(function (box) {
  var rounds = box.querySelectorAll('.round'), input = box.querySelector('input');
  var output = box.querySelector('output'), button = box.querySelector('button');
  function show() {
    rounds.forEach(function (round, i) { round.classList.toggle('on', i === +input.value); });
    output.textContent = rounds[+input.value].querySelector('h3').textContent;
    input.setAttribute('aria-valuetext', output.textContent);
  }
  input.max = rounds.length - 1; input.value = rounds.length - 1;
  input.addEventListener('input', show);
  button.addEventListener('click', function () {
    var all = box.classList.toggle('all');
    button.textContent = all ? 'One step' : 'All steps';
  });
  show();
});
function short(value) {
  var size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(+value.toPrecision(4));
}
document.querySelectorAll('svg[data-box]').forEach(function (svg) {
  var numbers = function (name) { return svg.dataset[name].split(' ').map(Number); };
  var box = numbers('box'), xs = numbers('x'), ys = numbers('y');
  var value = svg.parentNode.querySelector('.value'), before = value.textContent;
  var lines = [].map.call(svg.querySelectorAll('path:not(.faint)'), function (path) {
    return path.getAttribute('d').slice(1).split('L').map(function (pair) { return pair.split(' ').map(Number); });
  });
  var cross = document.createElementNS('http://www.w3.org/2000/svg', 'line');
  cross.setAttribute('class', 'cross'); cross.setAttribute('y1', box[1]); cross.setAttribute('y2', box[1] + box[3]);
  function number(place) { return ys[0] + (1 - (place - box[1]) / box[3]) * (ys[1] - ys[0]); }
  svg.addEventListener('pointermove', function (event) {
    var frame = svg.getBoundingClientRect();
    var at = (event.clientX - frame.left) / frame.width * svg.viewBox.baseVal.width, first = null;
    var texts = lines.map(function (points) {
      var near = points.reduce(function (a, b) { return Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a; });
      if (first === null) first = near[0];
      return short(number(near[1]));
    });
    cross.setAttribute('x1', first); cross.setAttribute('x2', first); svg.appendChild(cross);
    var step = Math.round(xs[0] + (first - box[0]) / box[2] * (xs[1] - xs[0]));
    value.textContent = texts.join(' \\u00b7 ') + (svg.dataset.unit ? ' ' + svg.dataset.unit : '') + ' at step ' + step;
  });
  svg.addEventListener('pointerleave', function () { value.textContent = before; cross.remove(); });
});
"""


def escape(text: object) -> str:
    """What may come from a file, for a page: neither HTML nor characters that cannot be seen."""
    return html.escape(printable(str(text), keep="\n\t"))


def page(title: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def section(title: str, content: str) -> str:
    """Nothing without content."""
    return f"<section><h2>{escape(title)}</h2>\n{content}</section>\n" if content else ""


def tiles(entries: list[tuple[str, str, str]]) -> str:
    """(name, value, small print) as a row of boxes."""
    boxes = (
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(small)}</small></dd></div>"
        for name, value, small in entries
    )
    return f'<dl class="tiles">{"".join(boxes)}</dl>\n'


def table(head: list[str], rows: list[list[str]]) -> str:
    """Long names of settings in the first column break after an underscore."""
    lines = ([escape(row[0]).replace("_", "_<wbr>"), *map(escape, row[1:])] for row in rows)
    cells = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in line)}</tr>" for line in lines)
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{cells}</tbody></table></div>\n'


def picture(uri: str, description: str, caption: str = "") -> str:
    """A figure; the caption is HTML already."""
    image = f'<img src="{uri}" alt="{escape(description)}" title="{escape(description)}" loading="lazy">'
    return f"<figure>{image}{f'<figcaption>{caption}</figcaption>' if caption else ''}</figure>"
