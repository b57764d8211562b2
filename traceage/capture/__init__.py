"""Fresh traces from real engines: vLLM that labels its tokens, and what keeps it busy.

An *engine* (`engine`) is vLLM's server with routes that load a policy and then label it. A *fleet*
(`fleet`) is several of them behind one call. The *orchestrator* (`orchestrator`) keeps *episodes*
(`episodes`) of a *task* (`tasks`) in flight while policies change, and writes batches of them to a
trace store (`store`) that the rest of the library reads. The *trainer* (`trainer`) learns from
those batches and writes the policies; the *probe* (`probe`) checks an engine's labels.

Needs `pip install 'traceage[capture]'`; nothing outside this package imports it before it is used.
"""

from typing import Literal, get_args

UpdatePath = Literal["update-weights", "collective-rpc"]
"""How engines are given a policy: by routes that label it, or by a reload that does not."""
UPDATE_PATHS: tuple[UpdatePath, ...] = get_args(UpdatePath)
