"""What `explain` says of a dense layer of 64 inputs and of a convolution under formats of blocks, in linen and nnx."""

IN_BLOCKS = [
    ("mxfp8", "mxfp8", "mxfp8, computed with as numbers: it is a convolution"),
    ("nvfp4(activations=false)", "nvfp4(activations=false)", "nvfp4(activations=false)"),
    ("mxfp4/16", "mxfp4/16", "mxfp4/16"),
    ("mxfp8/16", "mxfp8/16, in blocks that no hardware multiplies", "mxfp8/16, computed with as numbers: it is a conv"),
    ("mxfp8/48", "left: blocks of 48 do not divide its 64 inputs", "mxfp8/48, computed with as numbers: it is a conv"),
]
