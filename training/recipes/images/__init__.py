"""The image classifier: its settings, data sets, augmentation, models, batch norm and trainer."""
