import sys
from pathlib import Path

if sys.dont_write_bytecode:
    # Tests import two thousand modules: pytest keeps what Python may not keep beside them.
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(Path(__file__).parents[1] / ".pytest_cache" / "bytecode")
