"""The style sheet of the report, beside that of its pictures."""

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  margin: 0 auto; padding: 1.2rem; max-width: 1120px; color: #22262b; background: #ffffff; }
body:not(:has(h3)) { max-width: 870px; }
h1 { font-size: 1.5rem; margin: 0 0 0.3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 1.6rem 0 0.2rem; }
h3 { font-size: 0.95rem; margin: 0.4rem 0 0; font-weight: 600; }
p { margin: 0.2rem 0; }
.soft, figcaption, footer { color: #5d666f; }
.problem { border-left: 3px solid #c0392b; padding-left: 0.6rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: 0.6rem;
  margin: 1rem 0; }
.cards div { border: 1px solid #e4e7ea; border-radius: 6px; padding: 0.5rem 0.7rem; }
dt { color: #5d666f; font-size: 0.85rem; }
dd { margin: 0; font-variant-numeric: tabular-nums; }
figcaption { margin-bottom: 0.4rem; }
figure { margin: 0; break-inside: avoid; }
.side { display: flex; flex-wrap: wrap; gap: 0 1rem; }
.side svg { max-width: 100%; height: auto; display: block; }
.narrow { display: none; }
.scrolled { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.88rem;
  font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 0.28rem 0.7rem 0.28rem 0; vertical-align: top;
  border-bottom: 1px solid #e4e7ea; }
td { white-space: nowrap; }

td.text, td:last-child { white-space: normal; min-width: 14rem; }
.compare td, .compare td:last-child { white-space: normal; min-width: 0; }
tr:target { background: #fff3d6; }
details { margin-top: 1.6rem; }
pre { overflow-x: auto; font-size: 0.8rem; }
footer { margin-top: 2rem; font-size: 0.85rem; }
@media (max-width: 640px) {
  body { padding: 0.7rem; }
  .wide { display: none; }
  .narrow { display: flex; }
}
@media print { .narrow { display: none; } .wide { display: flex; } body { font-size: 12px; } }
@media screen and (prefers-color-scheme: dark) {
  body { color: #e8eaed; background: #14171a; }
  .soft, figcaption, footer, dt { color: #a3abb3; }
  .cards div, th, td { border-color: #33393f; }
  .problem { border-color: #ff7a66; }
  tr:target { background: #3d3420; }
}
"""
