"""Modules whose dependencies are not installed are not imported for their examples."""

from importlib.util import find_spec

NEEDED_BY = {
    "vllm": ["engine"],
    "aiohttp": ["episodes", "fleet", "orchestrator", "probe"],
}

collect_ignore = [
    f"traceage/capture/{module}.py"
    for needed, modules in NEEDED_BY.items()
    if find_spec(needed) is None
    for module in modules
]
