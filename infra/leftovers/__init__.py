"""What the account holds of a stack that its state does not know: after an `up` that was killed, or a lost state.

account.py lists by tag what is there, state.py reads what Pulumi knows, __main__.py prints the difference.
"""
