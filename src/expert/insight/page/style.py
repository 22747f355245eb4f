"""How the page looks: one style sheet, light and dark, on a phone and on paper."""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fbfaf8; --card: #ffffff; --ink: #1f2328; --soft: #5f6670; --rule: #e4e1dc;
  --grid: #ebe8e3; --shade: #f3f1ed;
  --c1: #2f6db5; --c2: #cf6a1f; --c3: #2e8f6b; --c4: #7a5bbf; --c5: #b9446f; --c6: #c79a1b;
  --c7: #a3a8b0;
  --good: #22805c; --note: #2f6db5; --warning: #a86400; --error: #b8322a; --plain: #5f6670;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171b; --card: #1b1f25; --ink: #e5e7ea; --soft: #9aa3ad; --rule: #2c323a;
    --grid: #282e36; --shade: #20252c;
    --c1: #6aa5ea; --c2: #ee9551; --c3: #58c096; --c4: #ab90ee; --c5: #e37ba2; --c6: #e2bd55;
    --c7: #6b7480;
    --good: #5cc797; --note: #7db2f0; --warning: #e9ae4d; --error: #f0857c; --plain: #9aa3ad;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; padding: 3.5rem 1.5rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere;
}
main, header, footer, nav { max-width: 66rem; margin: 0 auto; }
h1 { font-size: 2.1rem; line-height: 1.2; margin: 0; letter-spacing: -0.02em; font-weight: 650; }
h2 { font-size: 1.3rem; margin: 0 0 1.1rem; letter-spacing: -0.01em; font-weight: 620; }
p { margin: 0 0 0.8rem; }
small { font-size: 0.82rem; color: var(--soft); }
.code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 0.8rem; }
.subtitle { color: var(--soft); margin: 0.35rem 0 1.6rem; }
.verdict { border-left: 4px solid var(--tone); padding: 0.15rem 0 0.15rem 1.1rem; }
.verdict strong { display: block; font-size: 1.25rem; line-height: 1.4; font-weight: 560; }
.kind { display: inline-block; margin-bottom: 0.5rem; padding: 0.1rem 0.7rem; border-radius: 1rem;
  font-size: 0.85rem; font-weight: 600; color: var(--card); background: var(--tone); }
.verdict p { color: var(--soft); margin: 0.5rem 0 0; }
.verdict strong, .words, .reasons { white-space: pre-line; }
nav { margin-top: 1.8rem; padding: 0.8rem 0; border: solid var(--rule); border-width: 1px 0;
  display: flex; flex-wrap: wrap; gap: 0.3rem 1.2rem; font-size: 0.9rem; }
nav a { color: var(--soft); text-decoration: none; }
nav a:hover { color: var(--ink); text-decoration: underline; }
section { margin-top: 3.2rem; scroll-margin-top: 1rem; }
.grid { display: grid; gap: 1.2rem; grid-template-columns: repeat(2, minmax(0, 1fr)); }
.grid > * { min-width: 0; grid-column: 1 / -1; margin: 0; }
.grid > figure:not(.wide) { grid-column: auto; }
.tone-good { --tone: var(--good); } .tone-note { --tone: var(--note); }
.tone-warning { --tone: var(--warning); } .tone-error { --tone: var(--error); }
.tone-plain { --tone: var(--plain); }
.cards { display: grid; gap: 0.9rem; grid-template-columns: repeat(4, minmax(0, 1fr));
  padding: 0; list-style: none; }
.cards li { background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  padding: 0.9rem 1.1rem 1rem; }
.cards span { display: block; font-size: 0.84rem; color: var(--soft); }
.cards b { display: block; font-size: 1.65rem; line-height: 1.3; font-weight: 600;
  letter-spacing: -0.02em; }
.cards small { display: block; line-height: 1.35; margin-top: 0.15rem; }
.words { color: var(--tone); font-size: 0.92rem; }
.words.tone-plain { color: inherit; font-size: inherit; }
.words.tone-note { color: var(--soft); }

figure { background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  padding: 1.1rem 1.2rem 1rem; }
figcaption { font-weight: 600; font-size: 0.98rem; margin-bottom: 0.7rem; }
figure > p { font-size: 0.86rem; color: var(--soft); margin: 0.7rem 0 0; }
.legend { display: flex; flex-wrap: wrap; gap: 0.15rem 1.1rem; list-style: none; padding: 0;
  margin: -0.4rem 0 0.7rem; font-size: 0.84rem; color: var(--soft); }
.swatch { display: inline-block; width: 0.7rem; height: 0.7rem; border-radius: 3px;
  margin-right: 0.45rem; background: currentColor; flex: none; }
.c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.c4 { color: var(--c4); } .c5 { color: var(--c5); } .c6 { color: var(--c6); }
.c7 { color: var(--c7); }
.plot { position: relative; display: grid; grid-template: 13rem 1.4rem / 3.6rem 1fr; }
.wide .plot { grid-template-rows: 16rem 1.4rem; }
.area { display: block; width: 100%; height: 100%; overflow: visible; grid-area: 1 / 2; }
.tips { position: relative; grid-area: 1 / 2; }
.tip { position: absolute; inset-block: 0; outline: none; }
.tip:hover, .tip:focus { background: rgb(128 128 128 / 0.14); }
.tip b { display: none; position: absolute; top: 0.2rem; left: 100%; z-index: 2; margin: 0 0.4rem;
  padding: 0.3rem 0.55rem; border: 1px solid var(--rule); border-radius: 6px; pointer-events: none;
  background: var(--card); color: var(--ink); white-space: pre; font-size: 0.78rem;
  line-height: 1.4; font-weight: 500; box-shadow: 0 2px 8px rgb(0 0 0 / 0.16); }
.tip.late b { left: auto; right: 100%; }
.tip:hover b, .tip:focus b { display: block; }
.values { border: 0; padding: 0; margin-top: 0.5rem; background: none; }
.values summary { padding: 0.2rem 0; font-size: 0.82rem; color: var(--soft); }
.values table { font-size: 0.82rem; width: auto; }
.ys, .xs { position: relative; font-size: 0.75rem; line-height: 1; color: var(--soft); }
.ys span { position: absolute; right: 0.6rem; transform: translateY(50%); white-space: nowrap; }
.xs { grid-column: 2; }
.xs span { position: absolute; top: 0.5rem; transform: translateX(-50%); white-space: nowrap; }
.xs .first { transform: none; } .xs .last { transform: translateX(-100%); }
.x-name { text-align: right; padding: 0.5rem 0.6rem 0 0; font-size: 0.75rem; line-height: 1;
  color: var(--soft); white-space: nowrap; }
path { vector-effect: non-scaling-stroke; fill: none; }
path.grid { stroke: var(--grid); stroke-width: 1; }
path.line, path.dots { stroke: currentColor; stroke-width: 1.9; stroke-linejoin: round; }
path.dots { stroke-width: 1.4; stroke-opacity: 0.75; }
path.faint { stroke: currentColor; stroke-width: 1; opacity: 0.32; stroke-linejoin: round; }
path.dot { stroke: currentColor; stroke-width: 6; stroke-linecap: round; }
path.fill, rect.fill { fill: currentColor; shape-rendering: crispEdges; }

.wide-bar { position: relative; height: 3.2rem; border-radius: 6px; overflow: hidden; }
.wide-bar span { position: absolute; inset-block: 0; display: flex; align-items: center;
  justify-content: center; color: var(--card); font-size: 0.86rem; font-weight: 600;
  pointer-events: none; white-space: nowrap; overflow: hidden; }
.parts { list-style: none; margin: 0.9rem 0 0; padding: 0; font-size: 0.88rem; display: grid;
  gap: 0.25rem 2rem; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); }
.parts li { display: grid; grid-template-columns: 1.15rem 1fr auto 3.6rem; align-items: center; }
.parts b { font-weight: 560; } .parts small { text-align: right; }
.bars { list-style: none; margin: 0; padding: 0; display: grid; gap: 0.6rem; }
.bars li { display: grid; grid-template-columns: minmax(9rem, 16rem) 1fr 6.5rem;
  gap: 0.9rem; align-items: center; font-size: 0.9rem; }
.bars .name small { display: block; line-height: 1.3; }
.bars .bar { height: 1.35rem; border-radius: 4px; overflow: hidden; background: var(--shade); }
.bars b { text-align: right; font-weight: 580; white-space: nowrap; }
.bars .marked .name, .bars .marked b { color: var(--soft); font-weight: 400; }
.lanes { display: grid; gap: 0; }
.lane { display: grid; grid-template-columns: 9.5rem 1fr; align-items: center; font-size: 0.86rem; }
.lane > span { padding-right: 0.9rem; display: flex; justify-content: space-between; gap: 0.5rem; }
.lane svg { height: 1.75rem; }
.lane.axis .xs { height: 1.3rem; }
path.mark { stroke: var(--tone); stroke-width: 9; stroke-linecap: round; stroke-opacity: 0.85; }

.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.89rem; line-height: 1.45; }
th { text-align: left; font-weight: 560; color: var(--soft); font-size: 0.82rem; }
th, td { padding: 0.5rem 1rem 0.5rem 0; vertical-align: top; border-bottom: 1px solid var(--rule); }
th:last-child, td:last-child { padding-right: 0; }
td { white-space: pre-line; unicode-bidi: isolate; min-width: 4.5rem; overflow-wrap: break-word; }
td.code { overflow-wrap: anywhere; min-width: 9rem; }
td.number, th.number { text-align: right; white-space: nowrap; }
td.toned { color: var(--tone); font-weight: 560; white-space: nowrap; }
.checks { list-style: none; margin: 0; padding: 0; columns: 2; column-gap: 2.5rem;
  font-size: 0.92rem; }
.checks li { break-inside: avoid; padding: 0.2rem 0 0.2rem 1.5rem; text-indent: -1.5rem; }
.checks i { display: inline-block; width: 1.5rem; text-indent: 0; font-style: normal;
  color: var(--tone); }
.checks .tone-note { color: var(--soft); }
details { border: 1px solid var(--rule); border-radius: 10px; background: var(--card);
  padding: 0 1.2rem; }
.grid > details + details { margin-top: -0.6rem; }
summary { cursor: pointer; padding: 0.7rem 0; font-size: 0.95rem; }
details > .grid { padding: 0.2rem 0 1.1rem; }
.grid > .example { grid-column: auto; }
.example { border-left: 3px solid var(--tone); padding-left: 1rem; }
.example dt { font-size: 0.8rem; color: var(--soft); margin-top: 0.4rem; }
.example dd { margin: 0; white-space: pre-wrap; unicode-bidi: isolate; font-size: 0.9rem; }
footer { margin-top: 4rem; padding-top: 1rem; border-top: 1px solid var(--rule);
  color: var(--soft); font-size: 0.85rem; }

@media (max-width: 46rem) {
  body { padding: 2rem 1rem 3rem; }
  h1 { font-size: 1.7rem; }
  .grid { grid-template-columns: minmax(0, 1fr); }
  .cards { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 0.6rem; }
  .cards li { padding: 0.7rem 0.8rem 0.8rem; }
  .cards b { font-size: 1.3rem; }
  figure { padding: 0.9rem 0.8rem 0.8rem; }
  .plot, .wide .plot { grid-template: 12rem 1.4rem / 3rem 1fr; }
  .ys, .xs, .x-name { font-size: 0.7rem; }
  .xs.dense span:nth-child(even) { display: none; }
  .xs.bins span { font-size: 0.62rem; }
  .checks { columns: 1; }
  .lane { grid-template-columns: 1fr; }
  .lane > span { padding: 0.35rem 0 0; }
  .lane svg { height: 1.3rem; }
  .lane svg, .lane .xs { grid-column: 1; }
  .lane.axis > span { display: none; }
  .bars li { grid-template-columns: 1fr 6rem; gap: 0.2rem 0.6rem; }
  .bars .name { grid-column: 1 / -1; }
  .parts { grid-template-columns: 1fr; }
  table.stacked thead { display: none; }
  table.stacked, table.stacked tbody, table.stacked tr, table.stacked td { display: block; }
  table.stacked tr { border-bottom: 1px solid var(--rule); padding: 0.6rem 0; }
  table.stacked td { border: 0; padding: 0.1rem 0; text-align: left; white-space: pre-line; }
  table.stacked td[data-name]::before { content: attr(data-name) " "; color: var(--soft);
    font: 0.8rem system-ui, sans-serif; margin-right: 0.4rem; }
  table.stacked td[data-name=""]::before { content: none; }
}
@media print {
  :root { --paper: #fff; --card: #fff; --ink: #111; --soft: #555; --rule: #ccc; --grid: #ddd;
    --shade: #eee; --c1: #2f6db5; --c2: #cf6a1f; --c3: #2e8f6b; --c4: #7a5bbf; --c5: #b9446f;
    --c6: #c79a1b; --c7: #a3a8b0; --good: #22805c; --note: #2f6db5; --warning: #a86400;
    --error: #b8322a; --plain: #555; color-scheme: light; }
  body { padding: 0; font-size: 11pt; print-color-adjust: exact;
    -webkit-print-color-adjust: exact; }
  nav, .tips, .values { display: none; }
  section { margin-top: 1.6rem; }
  figure, .cards li, tr, .example { break-inside: avoid; }
  h2, summary, .words { break-after: avoid; }
  table { font-size: 8pt; }
  th, td, td.code { padding: 0.25rem 0.6rem 0.25rem 0; min-width: 0; }
  .code { font-size: 7.5pt; }
  .scroll { overflow: visible; }
  figure:not(.wide) .xs.dense span:nth-child(even) { display: none; }
  .plot, .wide .plot { grid-template-rows: 9rem 1.4rem; }
  details::details-content { content-visibility: visible; block-size: auto; }
}
"""
