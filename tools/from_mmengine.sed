# Makes code written for MMEngine import what trains from hooktrain. What hooktrain lacks there, such
# as initialisers of weights, comes from mmengine where that is installed; files, data sets,
# structures and configurations keep their imports. docs/migrating.md has the rest.
#
#     sed -E -i -f tools/from_mmengine.sed model.py hooks.py
s/^( *)from mmengine(\.(_strategy|dist|evaluator|hooks|logging|model|optim|registry|runner)(\.[A-Za-z_.]+)?)? import /\1from hooktrain.compat.mmengine import /
s/^( *)import mmengine\.(_strategy|dist|evaluator|hooks|logging|model|optim|registry|runner) as /\1import hooktrain.compat.mmengine as /
