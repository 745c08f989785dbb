"""Liu et al., "What is the State of Memory Saving for Model Training?" (PAPAYA): its figures."""
