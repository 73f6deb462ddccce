"""The look of the page: one style sheet, light and dark."""

CSS = """
:root{color-scheme:light dark;--bg:#f7f7f5;--panel:#fff;--ink:#1d2125;--muted:#62686e;--line:#e5e5e1;--soft:#f1f1ee;
--s0:#0f766e;--s1:#c2410c;--k0:#0f766e;--k1:#2f6fb5;--k2:#7c5cc4;--k3:#b8860b;--k4:#c2410c;--k5:#8a9099;--k6:#a3527f;--k7:#5b7a3a;
--good:#15803d;--bad:#b91c1c;--shadow:0 1px 2px #0000000d,0 4px 16px #0000000a}
:root[data-theme=dark]{color-scheme:dark;--bg:#101314;--panel:#181c1e;--ink:#e9ecee;--muted:#9aa2a8;--line:#2a3033;
--soft:#20262a;--s0:#2dd4bf;--s1:#fb923c;--k0:#2dd4bf;--k1:#60a5fa;--k2:#a78bfa;--k3:#facc15;--k4:#fb923c;
--k5:#7b858c;--k6:#f472b6;--k7:#a3e635;--good:#4ade80;--bad:#f87171;--shadow:none}
@media(prefers-color-scheme:dark){:root:not([data-theme=light]){color-scheme:dark;--bg:#101314;--panel:#181c1e;
--ink:#e9ecee;--muted:#9aa2a8;--line:#2a3033;--soft:#20262a;--s0:#2dd4bf;--s1:#fb923c;--k0:#2dd4bf;--k1:#60a5fa;
--k2:#a78bfa;--k3:#facc15;--k4:#fb923c;--k5:#7b858c;--k6:#f472b6;--k7:#a3e635;--good:#4ade80;--bad:#f87171;--shadow:none}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 ui-sans-serif,system-ui,-apple-system,"Segoe UI",
Roboto,"Helvetica Neue",sans-serif;-webkit-text-size-adjust:100%}
main{max-width:1180px;margin:0 auto;padding:32px 24px 64px}
header{display:flex;flex-wrap:wrap;gap:4px 16px;align-items:baseline;margin-bottom:20px}
h1{font-size:27px;line-height:1.2;margin:0;letter-spacing:-.015em;overflow-wrap:anywhere}
header p{flex-basis:100%;margin:2px 0 0;color:var(--muted)}
.chip{font-size:12.5px;font-weight:600;padding:2px 10px;border-radius:99px;border:1px solid currentColor;
color:var(--muted)}
.chip.finished{color:var(--good)}.chip:is(.stopped,.killed){color:var(--bad)}.chip:is(.interrupted,.paused){color:var(--s1)}
#theme{margin-left:auto;font:inherit;font-size:13px;color:var(--muted);background:none;border:1px solid var(--line);
border-radius:8px;padding:3px 10px;cursor:pointer}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(112px,1fr));gap:10px;margin-bottom:14px}
.tile{background:var(--panel);border:1px solid var(--line);border-radius:12px;padding:12px 11px;
box-shadow:var(--shadow)}
.tile b{display:block;font-size:20px;font-weight:650;letter-spacing:-.01em;font-variant-numeric:tabular-nums;
white-space:nowrap}
.tile span{color:var(--muted);font-size:12.5px}
.grid2{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:14px}
.panel{background:var(--panel);border:1px solid var(--line);border-radius:14px;padding:18px 20px;min-width:0;
box-shadow:var(--shadow)}
.wide{grid-column:1/-1}
.stack{display:grid;gap:14px;align-content:start;min-width:0}
h2{font-size:15.5px;margin:0 0 12px;letter-spacing:-.005em}
h2 small{font-weight:400;font-size:13px;color:var(--muted);margin-left:10px}
h3{font-size:13px;margin:16px 0 6px;color:var(--muted);font-weight:600}
.curves{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:22px 30px}
figure{margin:0;min-width:0}
figcaption{display:flex;justify-content:space-between;gap:12px;font-size:13.5px;margin-bottom:6px}
figcaption b{font-weight:600}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;color:var(--muted);font-size:12.5px}
.legend i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.chart{display:grid;grid-template-columns:46px minmax(0,1fr);grid-template-rows:190px 20px}
.yaxis,.xaxis{position:relative;font-size:11.5px;color:var(--muted);font-variant-numeric:tabular-nums}
.yaxis span{position:absolute;right:8px;transform:translateY(-50%);white-space:nowrap}
.xaxis{grid-column:2}.xaxis span{position:absolute;top:4px;transform:translateX(-50%)}
.plot{position:relative;outline:none;touch-action:pan-y;cursor:crosshair}
.plot svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible}
.grid line{stroke:var(--line);stroke-width:1}.grid .mark{stroke:var(--muted);stroke-dasharray:4 3}
.curve{fill:none;stroke-width:1.75;stroke-linejoin:round;stroke-linecap:round}
.curve.s0,.dots.s0{stroke:var(--s0)}.curve.s1,.dots.s1{stroke:var(--s1)}
.dots{fill:none;stroke-width:6.5;stroke-linecap:round}
i.s0{background:var(--s0)}i.s1{background:var(--s1)}
.cross{position:absolute;top:0;bottom:0;width:1px;background:var(--muted);opacity:.55;display:none;pointer-events:none}
#tip{position:fixed;z-index:9;display:none;pointer-events:none;background:var(--ink);color:var(--panel);border-radius:8px;
padding:6px 10px;font-size:12.5px;line-height:1.45;font-variant-numeric:tabular-nums;white-space:nowrap}
#tip span{opacity:.72;margin-right:8px}
.bar{display:flex;height:24px;border-radius:7px;overflow:hidden;background:var(--soft);margin:2px 0 10px}
.bar i{min-width:2px}
.k0{background:var(--k0)}.k1{background:var(--k1)}.k2{background:var(--k2)}.k3{background:var(--k3)}
.k4{background:var(--k4)}.k5{background:var(--k5)}.k6{background:var(--k6)}.k7{background:var(--k7)}
.keys{display:grid;grid-template-columns:repeat(auto-fill,minmax(170px,1fr));gap:3px 18px;font-size:13.5px}
.keys div{display:flex;justify-content:space-between;gap:10px}.keys span{color:var(--muted)}
.keys i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:8px;vertical-align:-1px}
.keys b{font-weight:550;font-variant-numeric:tabular-nums;white-space:nowrap}
.hbar{display:grid;grid-template-columns:minmax(64px,auto) 1fr auto;gap:5px 12px;align-items:center;font-size:13.5px}
.hbar div{height:12px;border-radius:4px;background:var(--soft)}.hbar div i{display:block;height:100%;border-radius:4px}
.hbar b{font-weight:550;font-variant-numeric:tabular-nums;text-align:right}
table{border-collapse:collapse;font-size:13.5px;width:100%}
td,th{padding:4px 14px 4px 0;text-align:left;vertical-align:top;border-top:1px solid var(--line)}
tr:first-child td{border-top:0}thead th{border-top:0;color:var(--muted);font-weight:500;font-size:12.5px}
thead+tbody tr:first-child td{border-top:1px solid var(--line)}
td:last-child,th:last-child{padding-right:0}
.num{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.scroll{overflow-x:auto}
code,pre{font:12.5px/1.55 ui-monospace,"SF Mono",Menlo,Consolas,"Liberation Mono",monospace}
pre{margin:0;padding:14px 16px;background:var(--soft);border-radius:10px;overflow:auto;max-height:460px;tab-size:4}
pre.text{white-space:pre-wrap;overflow-wrap:anywhere}
pre .key{color:var(--k1)}
details{margin-top:12px}summary{cursor:pointer;color:var(--muted);font-size:13.5px;margin-bottom:8px}
.lay{display:grid;grid-template-columns:minmax(250px,330px) minmax(0,1fr);gap:8px 36px}
.lay h3{margin-top:4px}
.slices{display:grid;grid-template-columns:repeat(auto-fill,minmax(190px,1fr));gap:18px 22px;margin-top:8px}
.slices svg{display:block;width:100%;height:86px;overflow:visible}
.slices .cell{fill:var(--soft);stroke:var(--panel);stroke-width:1.5}.slices .mine{fill:var(--k0)}
.slices code{display:block;overflow-wrap:anywhere;margin-top:7px}.slices small{color:var(--muted);font-size:12.5px}
.keys+.note,.scroll+.note{margin-top:10px}.note{color:var(--muted);font-size:13.5px;margin:0 0 4px;max-width:75ch}
.start{display:grid;grid-template-columns:150px 1fr;gap:2px 16px;align-items:center;font-size:13.5px;margin-bottom:10px}
.start small{color:var(--muted)}
.track{position:relative;height:20px}
.track i{position:absolute;top:6px;height:8px;border-radius:3px}
.track u{position:absolute;width:2px;height:8px;border-radius:1px}.track u.k4{top:-2px}.track u.k1{top:14px}
footer{margin-top:26px;color:var(--muted);font-size:12.5px}
@media(max-width:760px){main{padding:20px 14px 40px}.grid2,.curves{grid-template-columns:minmax(0,1fr)}
.panel{padding:15px 14px;border-radius:12px}h1{font-size:22px}.tiles{grid-template-columns:repeat(2,minmax(0,1fr))}
.tile:last-child:nth-child(odd){grid-column:1/-1}.lay{grid-template-columns:minmax(0,1fr)}
.chart{grid-template-rows:165px 20px}.start{grid-template-columns:1fr}h2 small{display:block;margin:2px 0 0}}
@media print{.panel{break-inside:avoid}#theme{display:none}pre{max-height:none}}
"""
