"""What modelled seconds are worth: held against published measurements that they were not fitted to."""
