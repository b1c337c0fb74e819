"""Continuing: which training a checkpoint belongs to, where it lies, when it is written, what is taken up.

fingerprint   what a training is made of: its data, its code, the *what* half of params.yaml
folder        the training's own folder: who works in it, its checkpoints, how it ended
found         what a start continues from, and why not, in words
keeper        writes checkpoints while training goes on
stop          SIGTERM and Ctrl-C: the window is finished, the state saved
clean         what the folders take, and which of them nobody needs
"""
