"""Where vLLM is not installed, the modules that need it are not imported for their examples."""

from importlib.util import find_spec

NEED_VLLM = ["engine", "episodes", "fleet", "orchestrator", "probe"]

collect_ignore = (
    [] if find_spec("vllm") else [f"traceage/capture/{module}.py" for module in NEED_VLLM]
)
