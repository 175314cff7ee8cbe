"""`python -m flux_db COMMAND`, or `flux-db COMMAND`: what there is, and its flags."""
