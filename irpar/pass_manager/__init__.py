"""The pass manager: runs a pipeline over a module, watched by an instrumentation.

manager = PassManager.parse("bind-dims{batch=8},infer-types,fold-constants")
result = manager.run(module)
"""

from .instrumentation import Instrumentation
from .manager import PassFailure, PassManager, PipelineResult, PipelineRun, without_copies
from .pipeline import (
    Pass,
    PassResult,
    PassWithinLimit,
    PipelineError,
    available_passes,
    find_pass,
    format_pass,
    format_pipeline,
    parse_pipeline,
)
from .progress import PassRecord, Progress
from .reproducer import read_reproducer, reproducer_pipeline

__all__ = [
    "Instrumentation",
    "Pass",
    "PassFailure",
    "PassManager",
    "PassRecord",
    "PassResult",
    "PassWithinLimit",
    "PipelineError",
    "PipelineResult",
    "PipelineRun",
    "Progress",
    "available_passes",
    "find_pass",
    "format_pass",
    "format_pipeline",
    "parse_pipeline",
    "read_reproducer",
    "reproducer_pipeline",
    "without_copies",
]
