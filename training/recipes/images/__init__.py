"""The image classifier: its settings, data sets, augmentation, models, running statistics and trainer."""
