# Makes a script written for detectron2 import from hooktrain. Models, data sets and
# configurations of detection keep their imports; docs/migrating.md says what else differs.
#
#     sed -E -i -f tools/from_detectron2.sed train_net.py configs/*.py
s/^([[:space:]]*)from (detectron2\.engine(\.[a-z_]+)?|detectron2\.checkpoint(\.detection_checkpoint)?) import /\1from hooktrain.compat.detectron2 import /
s/^([[:space:]]*)from detectron2\.config(\.(config|lazy|instantiate))? import /\1from hooktrain.compat.detectron2 import /
s/^([[:space:]]*)from detectron2\.data(\.(build|common|samplers(\.[a-z_]+)?))? import /\1from hooktrain.compat.detectron2 import /
s/^([[:space:]]*)from detectron2\.evaluation(\.(evaluator|testing))? import /\1from hooktrain.compat.detectron2 import /
s/^([[:space:]]*)from detectron2\.model_zoo(\.model_zoo)? import /\1from hooktrain.compat.detectron2 import /
s/^([[:space:]]*)from detectron2 import model_zoo/\1from hooktrain.compat.detectron2 import model_zoo/
s/^([[:space:]]*)from detectron2\.solver(\.(build|lr_scheduler))? import /\1from hooktrain.compat.detectron2.solver import /
s/^([[:space:]]*)from detectron2\.utils(\.(collect_env|comm|env|events|file_io|logger|memory|registry))? import /\1from hooktrain.compat.detectron2 import /
s/^([[:space:]]*)from fvcore\.common\.(checkpoint|file_io|history_buffer|param_scheduler|registry|timer) import /\1from hooktrain.compat.detectron2 import /
s/^([[:space:]]*)from (fvcore\.nn\.precise_bn|iopath\.common\.file_io|omegaconf) import /\1from hooktrain.compat.detectron2 import /
s/(^|[^.A-Za-z0-9_])detectron2\.(engine\.hooks|utils\.(comm|events|logger))/\1hooktrain.compat.detectron2/g
s/getLogger\((["'])(detectron2|fvcore|d2)(["'.])/getLogger(\1hooktrain\3/
