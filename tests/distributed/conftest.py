import sys
from pathlib import Path

# Spawned ranks import the helpers by name.
sys.path.insert(0, str(Path(__file__).parent))
