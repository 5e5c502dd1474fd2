"""Prediction heads of world models: reward, success, value and uncertainty."""
