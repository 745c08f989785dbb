"""DyNN-Offload's tables and figures."""
