"""Files of records: ArrayRecord, TFRecord and Parquet, read by blocks and checked while they are read.

Records are bytes here; `anystep.records` parses them. A new container is a file here and a row in
`containers`.
"""
