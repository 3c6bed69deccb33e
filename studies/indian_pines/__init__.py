"""Order 3: features of hyperspectral patches, and whether they tell crops apart.

A `TVRBM` learns features of 9x9x200 patches of the scene Indian Pines without labels. They are compared with raw
spectra, raw patches and principal components, all under the same classifiers. Training pixels lie in small blocks, and
no patch of a test pixel shares a pixel with a training patch. Patches of neighboring pixels overlap, so a random choice
of pixels would test on training data.

`run` computes one draw of blocks; `page` has the plan, the summary over draws, the label map and the command.
"""
