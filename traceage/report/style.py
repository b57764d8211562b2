"""The style sheet of the page."""

from __future__ import annotations

from traceage.figures.style import DARK, LIGHT, css_variables

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What the page may do: use its own styles and images, and nothing else."""

_RULES = """
:root{color-scheme:light dark;--page:#f5f6f8;--card:#fff;--ink:#1f2430;--muted:#5a6272;
--rule:#e3e6eb;--head:#fafbfc;--fault:#a53806;--fault-card:#fdf1ea;--part:#8a5a00;--link:#0b5a93}
@media(prefers-color-scheme:dark){:root{--page:#101319;--card:#171a21;--ink:#e6e9ef;
--muted:#a2abba;--rule:#2c323d;--head:#1d212a;--fault:#ff9a5c;--fault-card:#2b1c13;--part:#e5b454;--link:#7cc4f4}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1120px;margin:0 auto;padding:32px 24px 48px}
h1{font-size:26px;line-height:1.25;margin:0 0 20px;overflow-wrap:anywhere}
h2{font-size:17px;margin:32px 0 10px}
h3{font-size:14px;margin:16px 0 8px;overflow-wrap:anywhere}
p{margin:0 0 12px;max-width:76ch}
code{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
ul{margin:0 0 8px;padding-left:20px}
.answers{margin:16px 0 0;background:var(--card);border:1px solid var(--rule);border-radius:8px;
overflow:hidden}
.answers div{display:grid;grid-template-columns:minmax(0,15rem) minmax(0,1fr);gap:4px 24px;
padding:10px 16px;border-top:1px solid var(--rule)}
.answers div:first-child{border-top:0}
.answers dt{color:var(--muted)}
.answers dd{margin:0;max-width:76ch}
.answers .bad strong{color:var(--fault)}
nav ul{display:flex;flex-wrap:wrap;gap:4px 20px;margin:20px 0 0;padding:0;list-style:none}
a{color:var(--link)}
details{margin:0 0 16px}
summary{cursor:pointer;padding:6px 2px;color:var(--muted)}
.missing{padding:10px 16px;background:var(--card);border:1px dashed var(--rule);border-radius:8px;
max-width:none;color:var(--muted)}
.pair{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:0 16px}
@media(min-width:761px){.pair figure svg{min-width:0}}
.scroll+figure{margin-top:16px}
td.words{white-space:normal;min-width:16rem;vertical-align:top}
em{font-style:normal;font-weight:600}
.notes{color:var(--part)}
.tiles{display:flex;flex-wrap:wrap;gap:1px;margin:0;
background:var(--rule);border:1px solid var(--rule);border-radius:8px;overflow:hidden}
.tiles div{flex:1 1 140px;background:var(--card);padding:12px 16px}
.tiles dt{font-size:13px;color:var(--muted)}
.tiles dd{margin:0;font-size:13px;color:var(--muted);font-variant-numeric:tabular-nums}
.tiles dt+dd{font-size:23px;line-height:1.3;color:var(--ink)}
.fault{margin:16px 0 0;padding:10px 16px;max-width:none;border-left:4px solid var(--fault);
background:var(--fault-card);border-radius:0 8px 8px 0}
.fault strong{color:var(--fault)}
figure{margin:0 0 16px;padding:16px 20px;background:var(--card);border:1px solid var(--rule);
border-radius:8px;overflow-x:auto}
figure svg{display:block;width:100%;min-width:540px;max-width:900px;height:auto;margin:0 auto}
figure text{font-family:inherit}
figcaption{margin:10px auto 0;max-width:900px;font-size:13px;color:var(--muted)}
.key{margin:10px 0 0;max-width:none;font-size:13px;color:var(--muted)}
.dark{display:none}
@media(prefers-color-scheme:dark){.light{display:none}.dark{display:block}}
@media print{.tall{max-height:none!important}}
.scroll{overflow:auto;background:var(--card);border:1px solid var(--rule);border-radius:8px}
.tall{max-height:34rem}
table{border-collapse:separate;border-spacing:0;width:100%;font-size:13.5px;
font-variant-numeric:tabular-nums}
th,td{padding:5px 11px;text-align:right;white-space:nowrap;border-top:1px solid var(--rule)}
thead{position:sticky;top:0;z-index:1}
thead th{background:var(--head);color:var(--muted);font-weight:600;vertical-align:bottom;
white-space:normal;border-top:0}
thead th[colspan]{text-align:center;border-bottom:1px solid var(--rule)}
tbody th{font-weight:600;background:var(--card)}
tr>:first-child[scope]{position:sticky;left:0}
tbody tr:hover>*{background:var(--head)}
th.text,td.text{text-align:left}
.bad{color:var(--fault);font-weight:700}
.part{color:var(--part)}
:focus-visible{outline:2px solid #2f86bd;outline-offset:2px}
@media(max-width:760px){.answers div,.pair{display:block}.answers dt{margin-bottom:2px}
main{padding:20px 14px 32px}figure{padding:12px}
th,td{padding:4px}table{font-size:11.5px}}
"""

STYLE = (
    f"{_RULES}:root{{{css_variables(LIGHT)}}}\n"
    f"@media(prefers-color-scheme:dark){{:root{{{css_variables(DARK)}}}}}\n"
)
