"""Who watches a run: its state, the progress bar, CloudWatch, the watchdog for hangs, and the report of a failure.

It may use Ray and everything below it; nothing here decides whether a run goes on.
"""
