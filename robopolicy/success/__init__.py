"""Success classifiers: trained on labelled images or states, calibrated, and used as the success of a world."""
