"""The record of what is charged to a namespace's quota, and how usage is reported."""
