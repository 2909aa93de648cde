"""The admission webhook: /mutate picks a model and injects hints, /validate charges, /quota checks edits."""
