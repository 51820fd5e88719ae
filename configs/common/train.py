"""What `train` can hold, with its defaults."""

train = dict(
    output_dir="./output",
    init_checkpoint="",  # weights to start from, a path or an address; "" for none
    resume_parts=None,  # what --resume loads: None is all, else like ["model", "trainer.optimizer"]
    max_iter=None,  # where the run ends, such as 90000
    max_epochs=None,  # in place of max_iter. Periods may be texts such as "1 epoch"
    epoch_length=None,  # iterations of an epoch; None asks the loader
    seed=1,  # None draws one and writes it into config.json, where --resume takes it from
    # "auto" takes the processes that there are. Others are "FSDPStrategy", or a dict with options,
    # like dict(type="FSDPStrategy", wrap=["Block"], mp_policy=dict(param_dtype="bfloat16")).
    strategy="auto",
    device=None,  # None is the accelerator, if there is one; else like "cpu" or "cuda:1"
    compile=False,  # True, names of classes like ["Block"], or a dict of torch.compile's arguments
    activation_checkpointing=None,  # names of classes like ["Block"], computed again when needed
    cudnn_benchmark=False,
    amp=dict(enabled=False, dtype="float16"),
    accumulative_counts=1,  # batches to one update
    clip_grad=None,  # like dict(max_norm=1.0), or dict(type="value", clip_value=0.5)
    # type chooses the wrapper by name, such as "SeparateDistributedDataParallel" for a GAN.
    ddp=dict(
        type=None,
        broadcast_buffers=False,
        find_unused_parameters=False,
        fp16_compression=False,
    ),
    sync_bn=None,  # "torch": batch norms take their statistics from the batches of all ranks
    # enable=True multiplies learning rates by the batch of all ranks over base_batch_size
    auto_scale_lr=dict(enable=False, base_batch_size=None),
    ema=dict(enabled=False, decay=0.999),
    checkpointer=dict(
        period=5000,
        max_to_keep=100,
        background=False,  # training waits for a copy of the state only, and a thread writes it
        sharded=False,  # a folder that each rank writes its part of, instead of one file
    ),
    eval_period=5000,  # 0 evaluates at the end only
    best_metric=None,  # such as "classification/accuracy": keeps model_best.pth
    best_mode=None,  # "max" if more of best_metric is better, "min" if less is
    expected_results=None,  # like [("classification", "accuracy", 99.0, 1.0)]: checked at the end
    log_period=20,
    watchdog_s=0,  # ends a process that makes no progress for so long; 0 waits for ever
)
