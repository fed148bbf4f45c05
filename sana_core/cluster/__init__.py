"""Images drawn by the GPUs of a Ray cluster: many at once, or one that several GPUs share.

connection  to the cluster's head: as a driver, or through Ray Client, whose driver is a process of the head
session     a connection that stays, with its actors, between the runs of a server
actor       a process of a machine with a GPU, or part of one, that keeps the models it has loaded
worker      what such a process does: load, draw a chunk of images, or compute some rows of one
pool        the actors of a run: asks Ray for them, leaves machines out that cannot draw, replaces those that die
batch       chunks of images, handed to the actors that are free
split       one image at a time, by all actors of the pool together

Ray decides which GPU is free, sends the code, reserves GPUs together, and measures. It restarts nothing: the driver
knows what each actor had.
"""
