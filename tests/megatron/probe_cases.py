"""The layouts that ``probe_worker.py`` runs, and how often it puts each fault in."""

import os

REPEATS = int(os.environ.get("PROBE_REPEATS", "1"))
"""How often each fault is introduced; .ci/run asks for 20."""
LAYOUTS = {
    2: {
        "DP2": {},
        "CP2": {"cp": 2},
        "PP2": {"pp": 2},
        "PP2xVPP2": {"pp": 2, "vpp": 2},
        "TP2": {"tp": 2},
        "EP2": {"ep": 2},
    },
    4: {
        "DP2xCP2": {"cp": 2},
        "DP2xPP2": {"pp": 2},
        "CP2xPP2xVPP2": {"cp": 2, "pp": 2, "vpp": 2},
        "DP2xTP2": {"tp": 2},
        "DP4xEP2, 2 optimizer instances": {"ep": 2, "instances": 2},
    },
}
"""By number of processes; DP is the rest."""
MEGATRON_LM_LAYOUTS = ("DP2", "PP2", "PP2xVPP2", "DP2xCP2")
"""Those that run under the config of Megatron-LM too."""
