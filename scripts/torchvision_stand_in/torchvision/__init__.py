"""The few functions of torchvision that diffusers' DreamBooth script calls, for environments that have no build of it.

On the module path of that script only, and only where torchvision itself is missing.
"""
