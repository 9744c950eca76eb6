"""The parts of gpu_smoke.py: functions of the kind of device, which return figures.

A part raises where what it found is wrong. No file here imports a framework when it is imported.
"""
