"""The graph that an Ascend device would run, compiled and read on a machine without one."""
