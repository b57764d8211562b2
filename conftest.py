"""What holds for all tests.

Modules whose dependencies are not installed are not imported for their examples, and no example is
failed by the clock, which says more of the machine than of the code.
"""

from importlib.util import find_spec

from hypothesis import settings

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

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
