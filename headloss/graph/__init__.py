"""A call as one operator of a compiled or exported graph.

`compiled` turns a call into the operator and its result into a record; `recipe` writes down the call and rebuilds it;
`spec` runs the rebuilt call and says beforehand what it will return; `ops` registers the operators on top of both.
"""
