"""From the results of runs to tables and plots. No model and no device is needed."""
