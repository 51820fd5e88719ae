# Makes code written for MMEngine import from hooktrain. What hooktrain lacks, such as Runner, is an
# ImportError that says what takes its place; docs/migrating.md has the rest.
#
#     sed -E -i -f tools/from_mmengine.sed model.py hooks.py
s/^( *)from mmengine(\.[A-Za-z_.]+)? import /\1from hooktrain.compat.mmengine import /
s/^( *)import mmengine(\.[a-z_.]+)? as /\1import hooktrain.compat.mmengine as /
