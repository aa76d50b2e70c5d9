"""Where journals live. The only SQL of perdure is in this package; everybody else speaks to the Store protocol in api.py."""
