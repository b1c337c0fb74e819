"""The three stages of dvc.yaml. Each wires the other rooms together and is run as a module:

python -m pipeline.stages.prepare | train | evaluate
"""
