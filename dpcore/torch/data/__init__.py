"""The user's data: batches, data sets and the loader of drawn batches."""
