"""``python -m benchmarks`` runs all of them."""

import sys

from benchmarks.run import main

sys.exit(main())
