"""The DAG engine: describe nodes, plan, run. It knows no stage of the pipeline and no image.

A node is up to date when its folder holds a _SUCCESS.json for the fingerprint of its config, its code and the outputs
that it is made from. Read in this order: node.py, fingerprint.py, attempts.py, plan.py, run.py, task.py.
"""
