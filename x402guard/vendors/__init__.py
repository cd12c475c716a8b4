"""What is known of the vendors of models: their hosts and regions, prices and limits, pictures and frames."""
