"""The graph that a card would run, compiled and read on a machine without one."""
