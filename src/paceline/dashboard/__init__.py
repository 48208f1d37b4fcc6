"""A local page that shows runs and jobs live. It reads run directories, and changes nothing.

``index`` knows which runs there are, ``view`` what one of them is at, ``curves`` follows its records,
``alerts`` says what a person should look at; ``server`` answers requests, for those whom ``access`` lets in.
"""
